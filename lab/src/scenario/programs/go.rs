//! A static program of Go, under which no library can be put, built by Debian's compiler.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::image::cache_dir;
use crate::packages::unpacked;

const VERSION: &str = "1.19";
const SOURCE: &str = include_str!("files.go");

/// The program's file. It is built once; the compiler is downloaded for that.
pub(super) fn built() -> Result<PathBuf> {
    let dir = cache_dir().join("go");
    let (program, source) = (dir.join("files"), dir.join("files.go"));
    if program.is_file() && fs::read_to_string(&source).is_ok_and(|had| had == SOURCE) {
        return Ok(program);
    }
    let root = unpacked("go", &[&format!("golang-{VERSION}-go")])?;
    let root = root.join(format!("usr/lib/go-{VERSION}"));
    fs::create_dir_all(&dir).context("a directory for a program")?;
    let _ = fs::remove_file(&source);
    let part = dir.join("part.go");
    fs::write(&part, SOURCE)?;
    let mut build = Command::new(root.join("bin/go"));
    build.args(["build", "-ldflags", "-s -w", "-o"]).arg(&program).arg(&part);
    build.env("GOROOT", &root).env("GOCACHE", dir.join("cache")).env("GOENV", "off");
    build.env("CGO_ENABLED", "0").env("GO111MODULE", "off").current_dir(&dir);
    let out = build.output().context("running the compiler")?;
    ensure!(out.status.success(), "go build: {}", String::from_utf8_lossy(&out.stderr));
    fs::rename(part, source)?;
    Ok(program)
}
