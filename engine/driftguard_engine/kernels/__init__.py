"""What runs on a GPU: verification, n-gram drafts and the layers of a model; and the reference in numpy."""
