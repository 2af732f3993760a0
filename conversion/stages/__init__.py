"""Stages that make models of models."""
