"""What comes with the package: chat templates. Data and its look-up, nothing that acts."""
