"""Other people's code, trained plainly and compiled: every bit compared, or the sentence with which it was refused."""
