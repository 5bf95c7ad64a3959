"""What is made once and committed: the icons and the catalogues."""
