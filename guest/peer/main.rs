//! `nightporter-lab-peer`: a [`Peer`] that obeys over standard input and output, a JSON line each.
//! It is no init and is linked dynamically, so that a library can be preloaded.
//!
//! As `nightporter-lab-peer serve` it runs commands of others, and as `nightporter-lab-peer at
//! ADDRESS WORDS...` it sends a command to the one at that address ([`remote`]).

mod remote;

use std::io::{self, BufRead, Write};

use anyhow::{Context, Result, bail};
use nightporter_guest::peer::Peer;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => obey(),
        ["serve"] => remote::serve(),
        ["at", host, ref command @ ..] => {
            let status = remote::run_at(host, &command.join(" "))?;
            std::process::exit(status.into())
        }
        _ => bail!("no arguments, or `serve`, or `at ADDRESS WORDS...`"),
    }
}

fn obey() -> Result<()> {
    let mut peer = Peer::default();
    for line in io::stdin().lock().lines() {
        let line = line.context("reading what is asked")?;
        let ask = serde_json::from_str(&line).with_context(|| line.clone())?;
        let mut told = serde_json::to_vec(&peer.obey(ask))?;
        told.push(b'\n');
        let mut out = io::stdout().lock();
        out.write_all(&told).and_then(|()| out.flush()).context("answering")?;
    }
    Ok(())
}
