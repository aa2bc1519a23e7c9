"""A server with OpenAI's HTTP interface over examples/llama."""
