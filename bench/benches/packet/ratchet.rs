//! The instructions of a packet, pinned: `counts.txt` has the cost of each row when it was last
//! changed. The check fails if a row costs more. It also fails if a row costs less, so that the
//! file is lowered and the gain stays. Counts are exact; the compiler and the C library may move
//! them by a hair.

use std::fs;
use std::path::Path;

use super::{Error, LOG_PATHS, flood_instructions, instructions};

/// From the pinned count to where the check fails, both ways: two in a hundred.
const HAIR: f64 = 0.02;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/packet/counts.txt");

/// Counts each row of `counts.txt`, and compares.
pub(crate) fn check(dir: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(FILE)?;
    let early_ack = instructions(dir, "early-ack")?;
    let flood = flood_instructions(dir)?;
    let mut wrong = Vec::new();
    println!("row          pinned   now   (instructions per packet)");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (row, pinned) = line.split_once(' ').ok_or("a line is a row and its count")?;
        let pinned: f64 = pinned.trim().parse()?;
        let of_flood = flood.iter().find(|(of, _)| *of == row);
        let now = match row {
            "early-ack" => early_ack.engine,
            "turn" => early_ack.turn,
            path if LOG_PATHS.contains(&path) => instructions(dir, path)?.turn,
            _ if let Some((_, count)) = of_flood => *count,
            path => instructions(dir, path)?.engine,
        };
        println!("{row:<10} {pinned:>8.0} {now:>5.0}");
        if now > pinned * (1.0 + HAIR) {
            wrong.push(format!("{row} rose from {pinned} to {now:.0}: find out why"));
        } else if now < pinned * (1.0 - HAIR) {
            wrong.push(format!("{row} fell from {pinned} to {now:.0}: write that into counts.txt"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ").into()) }
}
