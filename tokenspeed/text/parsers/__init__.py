"""From generated text to reasoning, content and tool calls. `interface` is the face, `select` the way in."""
