"""Preparation and output transform of the camera branch: see README.md beside this file."""
