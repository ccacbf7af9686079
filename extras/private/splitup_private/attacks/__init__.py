"""Attacks on what a private model sends: how much of the text do they recover?"""
