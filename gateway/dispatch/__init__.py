"""The life of an admitted request: published, fenced, resumed on another worker, cancelled, recorded."""
