"""``exkv serve``: a model behind HTTP, in the words of OpenAI's API.

``requests`` turns what a client sends into jobs of the engine, ``answers`` what comes of them into
what it expects, ``app`` has the routes, ``guard`` the checks before them (keys, sizes, hosts), and
``server`` runs it all. FastAPI and uvicorn are an extra: ``pip install 'exkv[serve]'``.
"""
