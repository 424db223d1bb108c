"""Common parts of every HTTP edge: errors in OpenAI's envelope, bodies within limits, complete answers."""
