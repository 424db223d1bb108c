"""Files and batches: jobs of up to millions of requests, fed into the same queue as all other requests."""
