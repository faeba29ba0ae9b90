//! `nightporter-fuzz-targets DIR`: writes every target's seeds to `DIR/TARGET`, for cargo-fuzz.

use std::io::{Error, ErrorKind};
use std::path::Path;

use nightporter_fuzz_targets::TARGETS;

fn main() -> std::io::Result<()> {
    let usage = || Error::new(ErrorKind::InvalidInput, "usage: nightporter-fuzz-targets DIR");
    let corpus = std::env::args_os().nth(1).ok_or_else(usage)?;
    for target in TARGETS {
        let dir = Path::new(&corpus).join(target.name);
        std::fs::create_dir_all(&dir)?;
        for (n, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(dir.join(format!("seed-{n}")), seed)?;
        }
    }
    Ok(())
}
