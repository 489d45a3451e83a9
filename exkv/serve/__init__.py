"""``exkv serve``: a model behind an OpenAI-compatible HTTP API.

``requests`` turns request bodies into engine jobs, ``answers`` turns engine events into response
bodies, ``app`` has the routes, ``guard`` the checks before them (keys, sizes, hosts), and
``server`` runs it all. FastAPI and uvicorn are an extra: ``pip install 'exkv[serve]'``.
"""
