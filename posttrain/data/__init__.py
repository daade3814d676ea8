"""Data: conversion of files and datasets to rows, and of rows to tasks."""
