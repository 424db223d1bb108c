"""Other products, each in an environment of its own, to be measured beside Spillway in the same run."""
