"""What a run would do on other machines, from the files of a pilot run."""
