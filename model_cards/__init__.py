"""The cards of what is published, the claims of the papers, and the tools that make both."""
