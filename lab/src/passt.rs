//! passt as another back-end: a host that ends the remote's connections itself, in sockets of its
//! kernel, and makes connections of its own to the guest. Debian 12's has no vhost-user, so
//! Debian 13's source package is fetched by apt, with a sources list and a state of its own, and
//! built below `target/lab`. Nothing is installed.
//!
//! Each passt is on a machine of its own on the bridge, which has the guest's address and forwards
//! the data port; the guest has one more NIC for it. `passt` has the kernel's default receive
//! buffers, of which an upload fills 64 KB at most before the guest has to read; `passt-tuned` has
//! 8 MB.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_guest::bootline::Nic;
use nightporter_guest::data::PORT;

use crate::host::{Host, PREFIX, remote_address, sysctl};
use crate::image::cache_dir;
use crate::process::{Process, run};

/// How long passt may take to listen.
const START_LIMIT: Duration = Duration::from_secs(10);
/// `net.ipv4.tcp_rmem` of the tuned one: bytes a socket has at least, at first and at most.
const TUNED_RMEM: &str = "4096 8388608 8388608";

/// A program that was built.
#[derive(Debug, Clone)]
pub struct Passt {
    program: PathBuf,
    /// Version of the source package, as apt names it.
    pub version: String,
}

impl Passt {
    /// Fetches and builds it, once: removing `target/lab/passt` gets a newer one.
    ///
    /// # Errors
    /// No network, no apt, no compiler.
    pub fn build() -> Result<Self> {
        let dir = cache_dir().join("passt");
        let (program, version) = (dir.join("source/passt"), dir.join("version"));
        if let Ok(version) = fs::read_to_string(&version) {
            return Ok(Self { program, version });
        }
        // Built beside the final place and renamed, so that half of it is not kept.
        let part = dir.with_extension(format!("part{}", std::process::id()));
        fs::create_dir_all(part.join("state/lists/partial")).context("a directory for passt")?;
        let found = fetch(&part)?;
        let source = part.join("source");
        make(&source, &found)?;
        fs::write(part.join("version"), &found)?;
        let _ = fs::remove_dir_all(&dir);
        fs::rename(&part, &dir).with_context(|| format!("creating {}", dir.display()))?;
        Ok(Self { program, version: found })
    }

    /// Starts it for a guest's NIC `nic` on path `path`, on a machine `name` that it makes.
    ///
    /// # Errors
    /// ip(8)'s, or passt has ended; the message holds the end of its log.
    pub fn start(
        &self,
        host: &Host,
        (name, nic, path): (&str, &Nic, u8),
        tuned: bool,
        (dir, logs): (&Path, &Path),
    ) -> Result<Running> {
        let machine = host.add_machine(name, nic)?;
        let socket = dir.join(format!("{name}.sock"));
        let log = logs.join(format!("{name}.log"));
        let address = nic.address.to_string();
        let mut command = machine.command(&self.program);
        command.args(["--foreground", "--vhost-user", "--ipv4-only", "--runas", "0"]);
        command.arg("--socket").arg(&socket).args(["--mtu", "1500", "--interface", "eth0"]);
        command.args(["--address", &address, "--netmask", &PREFIX.to_string()]);
        command.args(["--gateway", &remote_address(path).to_string(), "--outbound", &address]);
        command.args(["--tcp-ports", &PORT.to_string(), "--udp-ports", "none"]);
        command.args(["--no-map-gw", "--no-dhcp"]);
        if tuned {
            machine.enter(|| sysctl("net/ipv4/tcp_rmem", TUNED_RMEM))?;
        }
        let mut running = Running { process: Process::spawn(name, command, &log)?, socket };
        let begin = Instant::now();
        while !running.socket.exists() {
            running.process.check_alive()?;
            ensure!(begin.elapsed() < START_LIMIT, "{name} did not listen in {START_LIMIT:?}");
            thread::sleep(Duration::from_millis(5)); // polls two conditions: socket, child
        }
        Ok(running)
    }
}

/// A passt that runs. Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    process: Process,
    /// On which it is a vhost-user back-end.
    pub socket: PathBuf,
}

impl Running {
    /// Its process.
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid()
    }
}

/// The source, unpacked to `source` in `dir`, whose checksum apt has verified; its version.
fn fetch(dir: &Path) -> Result<String> {
    let list = dir.join("sources.list");
    fs::write(&list, "deb-src http://deb.debian.org/debian trixie main\n")?;
    fs::write(dir.join("state/status"), "")?;
    let apt = |arguments: &[&str]| -> Result<String> {
        let mut command = Command::new("apt-get");
        command.arg("-q").current_dir(dir);
        for (option, value) in [
            ("Dir::Etc::sourcelist", list.clone()),
            ("Dir::Etc::sourceparts", "/dev/null".into()),
            ("Dir::State", dir.join("state")),
            ("Dir::State::status", dir.join("state/status")),
            ("Dir::Cache", dir.join("cache")),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        // apt's own unprivileged user may not be allowed to write here.
        command.args(["-o", "APT::Sandbox::User=root"]);
        let out = command.args(arguments).output().context("apt-get is not installed?")?;
        let error = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "apt-get {}: {}", arguments.join(" "), error.trim());
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    };
    apt(&["update"])?;
    let said = apt(&["--tar-only", "--download-only", "source", "passt"])?;
    let files: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    let is_it = |name: &str| name.starts_with("passt_") && name.contains(".orig.tar");
    let archive = files
        .iter()
        .find(|entry| entry.file_name().to_str().is_some_and(is_it))
        .context("apt-get source has left no archive")?
        .path();
    let source = dir.join("source");
    fs::create_dir_all(&source)?;
    let (archive_text, source_text) = (archive.to_string_lossy(), source.to_string_lossy());
    run("tar", &["-C", &source_text, "--strip-components=1", "-xf", &archive_text])?;
    version(&said).with_context(|| format!("no version of passt in {said:?}"))
}

/// In what `apt-get source` says: "Get:1 URL trixie/main passt VERSION (tar) [261 kB]".
fn version(said: &str) -> Option<String> {
    said.lines().find_map(|line| {
        let mut words = line.split(' ').skip_while(|&word| word != "passt");
        words.next()?;
        Some(words.next()?.to_owned()).filter(|_| line.starts_with("Get:"))
    })
}

fn make(source: &Path, version: &str) -> Result<()> {
    let mut targets = vec!["passt"];
    if cfg!(target_arch = "x86_64") {
        targets.push("passt.avx2"); // the first one starts it where it can run
    }
    let dir = source.to_string_lossy();
    let version = format!("VERSION={version}");
    let arguments = [&["-C", &*dir, &*version][..], &targets].concat();
    run("make", &arguments).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_what_apt_says_it_fetched() {
        let said = "Reading package lists...\nNeed to get 261 kB of source archives.\n\
                    Get:1 http://deb.debian.org trixie/main passt 0.0~git1-2 (tar) [26 kB]\n";
        assert_eq!(version(said), Some("0.0~git1-2".into()));
        assert_eq!(version("Skipping already downloaded file\n"), None);
    }
}
