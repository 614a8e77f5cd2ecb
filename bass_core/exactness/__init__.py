"""Verification rules, sampling and random numbers. Start reading the library at `verification.token`."""
