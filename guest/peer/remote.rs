//! Commands for other guests, in place of ssh, without keys, accounts and a terminal. Guests of the
//! lab trust each other.
//!
//! The guest that asks connects, sends a shell command, and finishes its stream. The other guest
//! sends the command's output, followed by a byte with its exit status.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result};

const PORT: u16 = 514;
/// The status of a command that was ended by a signal, or could not be started.
const FAILED: u8 = 255;

/// Runs the commands of others, for ever.
pub(crate) fn serve() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("listening")?;
    for stream in listener.incoming() {
        let stream = stream.context("accepting")?;
        thread::spawn(move || {
            if let Err(error) = run(stream) {
                eprintln!("a command of another guest: {error:#}");
            }
        });
    }
    Ok(())
}

fn run(mut stream: TcpStream) -> Result<()> {
    let mut command = String::new();
    stream.read_to_string(&mut command).context("reading it")?;
    let output = || stream.try_clone().map(|copy| Stdio::from(OwnedFd::from(copy)));
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &command]).stdin(Stdio::null()).stdout(output()?).stderr(output()?);
    let status = shell.status().context("/bin/sh")?;
    let status = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED);
    stream.write_all(&[status]).context("telling its status")
}

/// Has another guest run a command, and prints its output; returns its exit status.
pub(crate) fn run_at(host: &str, command: &str) -> Result<u8> {
    let mut stream = TcpStream::connect((host, PORT)).with_context(|| host.to_owned())?;
    stream.write_all(command.as_bytes()).context("asking")?;
    stream.shutdown(Shutdown::Write).context("asking")?;
    let mut said = Vec::new();
    stream.read_to_end(&mut said).context("hearing")?;
    // Without the last byte the other guest has gone.
    let status = said.pop().unwrap_or(FAILED);
    io::stdout().write_all(&said).context("saying what it said")?;
    Ok(status)
}
