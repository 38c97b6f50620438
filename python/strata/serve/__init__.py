"""HTTP in, server-sent events out, in OpenAI's protocol. Nothing here decides what is computed, kept or
moved."""
