//! `nightporter capture`: frames of a port as a pcap file, and the number of missed frames.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;
use nightporter_api::{Only, Request};

use crate::client::Client;
use crate::{copy, names, status};

/// How often the daemon is asked for the number of missed frames.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The frames to capture, and their file.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A VM or an uplink.
    #[arg(add = names::ports())]
    port: String,
    /// The file; `-` is standard output, as for `| tcpdump -r -`.
    #[arg(short = 'w', value_name = "FILE")]
    file: PathBuf,
    /// Capture only frames from or to this address.
    #[arg(long, value_name = "ADDRESS")]
    host: Option<IpAddr>,
    /// Capture only frames from or to this port of TCP or UDP.
    #[arg(long = "port", value_name = "NUMBER")]
    l4_port: Option<u16>,
    /// Capture at most so many bytes of each frame; 128 hold all headers, 0 is all.
    #[arg(short = 's', long, value_name = "BYTES")]
    snaplen: Option<u32>,
}

/// Captures until the reader or the daemon closes its end.
pub(crate) fn capture(client: Client, control: &Path, options: &Options) -> Result<()> {
    let Options { port, file, host, l4_port, snaplen } = options;
    let only = Only { host: *host, port: *l4_port };
    let snap_bytes = snaplen.filter(|bytes| *bytes > 0); // 0 as in tcpdump(8)
    let request = Request::Capture { port: port.clone(), snap_bytes, only };
    let stream = client.stream(&request)?;
    let (control, name) = (control.to_owned(), port.clone());
    thread::spawn(move || say_what_is_missed(&control, &name)); // ends with the process
    if file == Path::new("-") {
        return copy(stream, io::stdout(), "the daemon");
    }
    let to = File::create(file).map_err(|e| {
        let fix = "choose a file that you may write, or - for standard output";
        anyhow!("cannot write {}: {e}\n    fix: {fix}", file.display())
    })?;
    eprintln!("capturing {port} into {}; end with Ctrl-C", file.display());
    copy(stream, to, "the daemon")
}

/// Reports the number of missed frames whenever it has grown, until the daemon does not answer.
fn say_what_is_missed(control: &Path, port: &str) {
    let Ok(mut client) = Client::connect(control) else { return };
    let mut said = 0;
    while let Ok(status) = status(&mut client) {
        let missed = status.ports.iter().find(|p| p.name == port).map(|p| p.captures_missed);
        match missed {
            Some(missed) if missed > said => {
                eprintln!(
                    "captures of {port} have missed {missed} frames: the reader is too slow\n    \
                     fix: capture less with --snaplen, --host or --port"
                );
                said = missed;
            }
            _ => {}
        }
        thread::sleep(LOOK_INTERVAL);
    }
}
