"""Every model family in miniature through the whole product: `make family-matrix`."""
