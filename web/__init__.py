"""What every HTTP edge needs: errors in OpenAI's envelope, bodies within limits, whole answers."""
