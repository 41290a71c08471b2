"""Commands that show and change a cluster: `rt member`, `rt features`."""
