"""The command line: its own commands, and those that other packages add."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint, version

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weightsync import cli


def run(*arguments):
    return CliRunner().invoke(cli.build_app(), list(arguments))


def test_version_is_that_of_the_distribution():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"weightsync {version('weightsync')}\n"


def test_commands_of_other_packages_are_found_by_their_entry_points():
    assert "demo" in run("--help").output
    assert "--transport" in run("demo", "--help").output


def test_a_command_that_cannot_be_imported_leaves_the_others_working(monkeypatch, capsys):
    broken = EntryPoint("broken", "no_such_package.cli:run", cli.COMMANDS)
    monkeypatch.setattr(cli, "entry_points", lambda group: [broken])
    result = run("--help")
    assert result.exit_code == 0
    assert "manifest" in result.output
    assert "no_such_package.cli:run" in capsys.readouterr().err + result.stderr


def test_manifest_prints_what_a_push_would_carry(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    result = run("manifest", str(tmp_path), "--names")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[:2] == ["a  float32  [2, 3]", "b  bfloat16  [4]"]
    assert lines[2].startswith("2 tensors, 32 bytes, hash ")


def test_manifest_of_an_empty_folder_fails_with_its_path(tmp_path):
    result = run("manifest", str(tmp_path))
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == "/weight_info"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b'{"version": 7}' if found else b"{}")

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=60)


def test_status_prints_what_the_engine_says(url):
    result = run("status", f"{url}/")
    assert result.exit_code == 0
    assert json.loads(result.output) == {"version": 7}


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:9", "nonsense", "{url}/elsewhere"])
def test_status_without_an_engine_fails_with_the_address(url, wrong):
    address = wrong.format(url=url)
    result = run("status", address)
    assert result.exit_code == 1
    assert address in result.stderr
