//! `nightporter-lab-peer`: a [`Peer`] that obeys over standard input and output, a JSON line each.
//! It is no init and is linked dynamically, so that a library can be put under it.

use std::io::{self, BufRead, Write};

use anyhow::{Context, Result};
use nightporter_guest::peer::Peer;

fn main() -> Result<()> {
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
