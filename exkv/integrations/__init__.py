"""exkv inside other libraries: each subpackage needs its library, and nothing here imports one."""
