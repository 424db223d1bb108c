"""Files and batches: millions of prompts as a job, fed into the queue that everything else goes through."""
