"""The data set icons-30k: drawings from packages, named by their file names or by Unicode."""
