"""The queue server is lost, in part or as a whole, for a while or without a word."""
