"""Images in requests: read from bodies, fetched, measured, and placed among a prompt's tokens; never decoded."""
