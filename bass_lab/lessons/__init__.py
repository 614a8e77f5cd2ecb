"""Figures, widgets, demonstrations and exercises of the lessons, in modules per lesson."""
