"""A load generator for OpenAI-compatible servers: what arrives is drawn before the clock starts, then sent whether or
not the server keeps up, and every time is a client's.
"""
