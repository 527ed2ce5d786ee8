"""OpenAI's API: one endpoint a file, wire types and both directions."""
