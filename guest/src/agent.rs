//! The control loop.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};

use anyhow::{Context, Result, anyhow};
use nightporter_guest::bootline::Bootline;
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::netstat;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

use crate::load::Load;
use crate::lossy::Dropper;
use crate::program::{self, Program};
use crate::{boot, http, load, nic, service, vectors};

/// Boots the guest and obeys the host until it is told to leave.
pub(crate) fn run() -> Result<Infallible> {
    let bootline = boot::bring_up()?;
    vectors::check()?;
    let nics = nic::configure_all(&bootline)?;
    service::start()?;
    http::start()?;
    let mut port = open_serial(&bootline.control)?;
    send(&mut port, &Reply::Ready { nics: nics.clone() })?;
    let droppers = nics.iter().map(|_| None).collect();
    let mut agent = Agent { bootline, nics, load: None, droppers, programs: BTreeMap::new() };
    let mut lines = BufReader::new(port.try_clone()?).lines();
    loop {
        let line = lines.next().context("the control channel closed")??;
        let reply = serde_json::from_str(&line)
            .map_err(|e| anyhow!("{line:?}: {e}"))
            .and_then(|command| agent.obey(command))
            .unwrap_or_else(|e| Reply::Error { message: format!("{e:#}") });
        send(&mut port, &reply)?;
    }
}

struct Agent {
    bootline: Bootline,
    nics: Vec<String>,
    load: Option<Load>,
    droppers: Vec<Option<Dropper>>,
    programs: BTreeMap<String, Program>,
}

impl Agent {
    fn obey(&mut self, command: Command) -> Result<Reply> {
        match command {
            Command::Calibrate => Ok(Reply::Calibrated { loops_per_ms: load::calibrate() }),
            Command::LoadStart { loops_per_ms, percent } => {
                self.load = None; // the old load stops before the new one starts
                self.load = Some(Load::start(loops_per_ms, percent)?);
                Ok(Reply::Ok)
            }
            Command::LoadStop => {
                self.load = None;
                Ok(Reply::Ok)
            }
            Command::LoadStatus => self.load_status(),
            Command::DropFrames { nic, percent } => {
                let name = self.nic_name(nic)?.to_owned();
                self.droppers[nic] = None; // detaches the old program
                if percent > 0 {
                    self.droppers[nic] = Some(Dropper::attach(&name, percent)?);
                }
                Ok(Reply::Ok)
            }
            Command::DropStatus { nic } => {
                let dropper = self.droppers.get(nic).and_then(Option::as_ref);
                let (seen, dropped) = dropper.context("this NIC drops nothing")?.counts()?;
                Ok(Reply::Dropped { seen, dropped })
            }
            Command::Run { program, arguments, environment } => {
                let ran = program::run(&program, &arguments, environment, program::SILENCE)?;
                Ok(Reply::Ran { ok: ran.ok, output: ran.output })
            }
            Command::Start { name, program, arguments, environment } => {
                self.programs.remove(&name); // it may have what the new one wants
                self.programs.insert(name, Program::start(&program, &arguments, environment)?);
                Ok(Reply::Ok)
            }
            Command::Say { name, line } => {
                let program = self.programs.get_mut(&name).context("no program of this name")?;
                Ok(Reply::Said { line: program.say(line)? })
            }
            Command::Serve { namespace } => {
                service::start_inside(&namespace)?;
                Ok(Reply::Ok)
            }
            Command::Netstat { names } => counted(&names),
            Command::Write { path, text } => {
                std::fs::write(&path, text).with_context(|| path.clone())?;
                Ok(Reply::Ok)
            }
            Command::DriverUnbind { nic } => {
                self.droppers[nic] = None;
                nic::unbind(self.nic_name(nic)?)?;
                Ok(Reply::Ok)
            }
            Command::DriverBind { nic } => {
                nic::bind_all()?;
                self.nics[nic] = nic::configure(&self.bootline, nic)?;
                Ok(Reply::Ok)
            }
            Command::Vectors { rounds } => {
                vectors::strain(rounds)?;
                Ok(Reply::Ok)
            }
            Command::Reboot => boot::reboot_now(),
            Command::Crash => boot::crash(),
            Command::PowerOff => boot::power_off(),
        }
    }

    fn load_status(&self) -> Result<Reply> {
        let load = self.load.as_ref().context("no load is running")?;
        let (done_ms, backlog_ms, elapsed_ms) = load.status();
        Ok(Reply::Load { done_ms, backlog_ms, elapsed_ms })
    }

    fn nic_name(&self, nic: usize) -> Result<&str> {
        self.nics.get(nic).map(String::as_str).with_context(|| format!("no NIC {nic}"))
    }
}

fn counted(names: &[String]) -> Result<Reply> {
    let text = std::fs::read_to_string(netstat::FILE)?;
    let one =
        |name: &String| netstat::counted(&text, name).with_context(|| format!("no counter {name}"));
    Ok(Reply::Counted { values: names.iter().map(one).collect::<Result<_>>()? })
}

fn open_serial(name: &str) -> Result<File> {
    let path = format!("/dev/{name}");
    let port = OpenOptions::new().read(true).write(true).open(&path).context(path)?;
    let mut termios = tcgetattr(&port)?;
    cfmakeraw(&mut termios); // no echo, no line editing: JSON lines both ways
    tcsetattr(&port, SetArg::TCSANOW, &termios)?;
    Ok(port)
}

fn send(port: &mut File, reply: &Reply) -> Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    port.write_all(&line).context("writing to the control channel")
}
