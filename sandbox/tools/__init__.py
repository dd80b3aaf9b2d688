"""Tools that environments share: a Python interpreter, a shell, a file editor. Each is a class over one sandbox whose
methods are plain async functions from strings to a string for the model."""

from sparring.sandbox.tools.bash import BashTool
from sparring.sandbox.tools.editor import EditorTool
from sparring.sandbox.tools.python import PythonInterpreter, PythonTool
from sparring.sandbox.tools.render import render_result

__all__ = ["BashTool", "EditorTool", "PythonInterpreter", "PythonTool", "render_result"]
