"""exkv inside other libraries; importing this package imports none of them."""
