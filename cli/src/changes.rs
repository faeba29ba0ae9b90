//! The commands that add, change and remove ports, and the reload.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Error, Result, anyhow, bail};
use clap::{Args, Subcommand};
use nightporter_api::{Change, Plan, PortStatus, Reply, Request, Status};

use super::{CONTROL, Client, names, print, status, unexpected};
use crate::advise::span;
use crate::client::Refused;

/// How long a change may take before the daemon is asked whether it still answers.
const LIMIT: Duration = Duration::from_secs(60);

/// Where the daemon at [`CONTROL`] reads VMs of their own files.
const CONF_DIR: &str = "/etc/nightporter/conf.d";

/// Whether the change is made.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Dry {
    /// Show the changes, and make none.
    #[arg(long)]
    dry_run: bool,
}

/// Whether the change outlasts the daemon.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Save {
    /// It holds after a restart, too: a VM that comes is written into a file of its own in DIR
    /// (`conf.d` beside the daemon's configuration file), which a reload reads; the file of one
    /// that goes is removed. Needs the right to write there. With another --control DIR must be
    /// given.
    #[arg(long = "save", value_name = "DIR", num_args = 0..=1, require_equals = true,
          conflicts_with = "dry_run")]
    dir: Option<Option<PathBuf>>,
}

impl Save {
    /// The directory, if it outlasts the daemon.
    ///
    /// # Errors
    /// None is given, and the daemon is not the one of the default.
    fn dir(self, control: &Path) -> Result<Option<PathBuf>> {
        if self.dir == Some(None) && control != Path::new(CONTROL) {
            bail!(
                "--save alone is {CONF_DIR}, and --control names another daemon\n    \
                 fix: --save=DIR/conf.d, where DIR is that of its --config"
            );
        }
        Ok(self.dir.map(|dir| dir.unwrap_or_else(|| CONF_DIR.into())))
    }
}

/// A change of a VM, and how it is made.
pub(crate) type Wanted = (Change, Dry, Save);

/// The changes of `nightporter vm`.
#[derive(Debug, Subcommand)]
pub(crate) enum OfVm {
    /// Adds a VM: `vm add web3 mac=52:54:00:00:00:03 budget=128M`. Without --save it is not written
    /// into a file: a restart forgets the VM, a reload keeps it.
    Add {
        /// The name of the VM.
        name: String,
        /// Keys as in [[vm]] of the configuration file.
        #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
        keys: Vec<(String, String)>,
        #[command(flatten)]
        save: Save,
        #[command(flatten)]
        dry: Dry,
    },
    /// Changes keys of a VM: `vm set web1 mtu=9000 mac=` (an empty value is the default). Its
    /// connections stay, unless the VM gets into another VLAN. A reload or a restart restores the
    /// keys of the file.
    Set {
        /// The name of the VM.
        #[arg(add = names::vms())]
        name: String,
        /// Keys as in [[vm]] of the configuration file.
        #[arg(value_name = "KEY=VALUE", value_parser = key_value, required = true)]
        keys: Vec<(String, String)>,
        #[command(flatten)]
        dry: Dry,
    },
    /// Removes a VM, and ends its connections. Run `nightporter drain VM` first, so that no bytes
    /// are lost that the host has acknowledged. Without --save a VM that is in a file comes back
    /// with the next reload.
    Remove {
        /// The name of the VM.
        #[arg(add = names::vms())]
        name: String,
        #[command(flatten)]
        save: Save,
        #[command(flatten)]
        dry: Dry,
    },
}

/// `nightporter attach`: a VM that is named after its tap is added.
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The VM's tap, as in `virsh domiflist`; the VM has its name.
    tap: String,
    /// Keys as in [[vm]] of the configuration file.
    #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
    keys: Vec<(String, String)>,
    #[command(flatten)]
    save: Save,
    #[command(flatten)]
    dry: Dry,
}

impl Attach {
    /// The change that the daemon is asked for.
    ///
    /// # Errors
    /// A key is given twice.
    pub(crate) fn as_change(&self) -> Result<Wanted> {
        let tap = ("tap".into(), self.tap.clone());
        let keys: Vec<_> = [tap].into_iter().chain(self.keys.iter().cloned()).collect();
        let change = Change::AddVm { name: self.tap.clone(), keys: map(&keys)? };
        Ok((change, self.dry, self.save.clone()))
    }
}

/// `nightporter detach`: the VM with a tap is removed.
#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// The VM's tap.
    #[arg(add = names::taps())]
    tap: String,
    /// How long its connections may take until none owes anything (10s if nothing is given); those
    /// that still do are reset.
    #[arg(long, value_name = "TIME", value_parser = span)]
    drain: Option<Duration>,
    #[command(flatten)]
    save: Save,
    #[command(flatten)]
    dry: Dry,
}

impl Detach {
    /// The change that the daemon is asked for.
    ///
    /// # Errors
    /// No VM of this status has the tap.
    pub(crate) fn as_change(&self, status: &Status) -> Result<Wanted> {
        let vms = status.ports.iter().filter_map(|port| Some((port, tap_of(port)?)));
        let taps: Vec<_> = vms.clone().map(|(_, tap)| tap).collect();
        let Some((port, _)) = vms.into_iter().find(|(_, tap)| *tap == self.tap) else {
            let taps = if taps.is_empty() { "none is".into() } else { taps.join(", ") };
            bail!("{} is not attached\n    fix: name a tap that is: {taps}", self.tap)
        };
        let drain_ms = self.drain.map(|time| u64::try_from(time.as_millis()).expect("a day"));
        let change = Change::RemoveVm { name: port.name.clone(), drain_ms };
        Ok((change, self.dry, self.save.clone()))
    }
}

/// The tap by which a VM is attached.
pub(crate) fn tap_of(port: &PortStatus) -> Option<&str> {
    port.keys.get("tap").map(|tap| tap.trim_matches('"'))
}

/// `nightporter uplink`.
#[derive(Debug, Subcommand)]
pub(crate) enum OfUplink {
    /// Adds an uplink: `uplink add lan2 kind=tap ifname=np1 bridge=br0`.
    Add {
        /// The name of the uplink.
        name: String,
        /// Keys as in [[uplink]] of the configuration file.
        #[arg(value_name = "KEY=VALUE", value_parser = key_value, required = true)]
        keys: Vec<(String, String)>,
        #[command(flatten)]
        dry: Dry,
    },
    /// Removes an uplink.
    Remove {
        /// The name of the uplink.
        #[arg(add = names::uplinks())]
        name: String,
        #[command(flatten)]
        dry: Dry,
    },
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, as in mtu=9000")?;
    Ok((key.trim().into(), value.trim().into()))
}

fn map(keys: &[(String, String)]) -> Result<BTreeMap<String, String>> {
    let mut map = BTreeMap::new();
    for (key, value) in keys {
        if map.insert(key.clone(), value.clone()).is_some() {
            bail!("{key} is given twice\n    fix: give it once");
        }
    }
    Ok(map)
}

impl OfVm {
    /// The change that the daemon is asked for.
    ///
    /// # Errors
    /// A key is given twice.
    pub(crate) fn as_change(&self) -> Result<Wanted> {
        Ok(match self {
            Self::Add { name, keys, dry, save } => {
                let change = Change::AddVm { name: name.clone(), keys: map(keys)? };
                (change, *dry, save.clone())
            }
            Self::Set { name, keys, dry } => {
                (Change::SetVm { name: name.clone(), keys: map(keys)? }, *dry, Save::default())
            }
            Self::Remove { name, dry, save } => {
                let change = Change::RemoveVm { name: name.clone(), drain_ms: None };
                (change, *dry, save.clone())
            }
        })
    }
}

impl OfUplink {
    /// The change that the daemon is asked for.
    ///
    /// # Errors
    /// A key is given twice.
    pub(crate) fn as_change(&self) -> Result<(Change, Dry)> {
        Ok(match self {
            Self::Add { name, keys, dry } => {
                (Change::AddUplink { name: name.clone(), keys: map(keys)? }, *dry)
            }
            Self::Remove { name, dry } => (Change::RemoveUplink { name: name.clone() }, *dry),
        })
    }
}

impl Dry {
    /// The reload.
    pub(crate) fn as_change(self) -> (Change, Self) {
        (Change::Reload {}, self)
    }
}

/// Changes a VM; with a directory, it comes by a file of its own there, or goes with that.
pub(crate) fn of_vm(
    connect: impl Fn() -> Result<Client>,
    control: &Path,
    json: bool,
    (change, dry, save): Wanted,
) -> Result<()> {
    match (save.dir(control)?, &change) {
        (Some(dir), Change::AddVm { name, .. }) => {
            let name = name.clone();
            self::save(connect, control, json, (&name, &dir), change)
        }
        (Some(dir), Change::RemoveVm { name, .. }) => {
            let path = file_of(name, &dir);
            must_be_own(name, &path)?;
            remove(connect()?, control, json, &path, change)
        }
        _ => self::change(connect()?, control, json, (change, dry)),
    }
}

/// The file of a VM that is saved in `dir`.
fn file_of(name: &str, dir: &Path) -> PathBuf {
    dir.join(format!("{name}.toml"))
}

/// The file is a VM's own.
///
/// # Errors
/// There is no such file, or it may have more than this VM.
fn must_be_own(name: &str, path: &Path) -> Result<()> {
    let fix = format!(
        "take VM {name} out of the file that has it, and `nightporter reload`; if none has it, \
         leave out --save"
    );
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|e| anyhow!("cannot read {shown}: {e}\n    fix: {fix}"))?;
    let lines = text.lines().map(str::trim);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let begins = lines.next() == Some("[[vm]]");
    let has_others = lines.clone().any(|line| line.starts_with('['));
    if !begins || has_others || !lines.any(|line| line == format!("name = \"{name}\"")) {
        bail!("{shown} has more than VM {name}, or another\n    fix: {fix}");
    }
    Ok(())
}

/// Removes a VM, and then its file: whoever interrupts it keeps the file.
fn remove(client: Client, control: &Path, json: bool, path: &Path, change: Change) -> Result<()> {
    let shown = path.display();
    self::change(client, control, json, (change, Dry { dry_run: false })).map_err(|e| {
        let may_be = format!("{shown} stays, and the VM may be removed");
        if e.is::<Refused>() { e } else { e.context(may_be) }
    })?;
    fs::remove_file(path).map_err(|e| {
        anyhow!(
            "the VM is removed, and its file {shown} stays: {e}\n    \
             fix: remove the file as root, or the next reload adds the VM again"
        )
    })
}

/// Adds a VM by a file of its own, and a reload: the daemon itself writes no configuration.
///
/// # Errors
/// The VM cannot be, or not be written, or the daemon does not read it there: then there is no
/// file. Without an answer the file stays.
fn save(
    connect: impl Fn() -> Result<Client>,
    control: &Path,
    json: bool,
    (name, dir): (&str, &Path),
    change: Change,
) -> Result<()> {
    let mut client = connect()?;
    client.wait_for(LIMIT)?;
    let section = match client.ask(&Request::Change { change, dry_run: true })? {
        Reply::Plan(Plan { section: Some(section), .. }) => section,
        Reply::Plan(plan) => {
            eprintln!("{name} is in a configuration file already: nothing is written");
            return print(json, &plan, |_| Ok(()));
        }
        other => return unexpected(&other),
    };
    let path = file_of(name, dir);
    make_dir(dir).map_err(not_written(dir))?;
    write_new(&path, |file| file.write_all(section.as_bytes()))?;
    if let Err(e) = self::change(client, control, json, Dry { dry_run: false }.as_change()) {
        if e.is::<Refused>() {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        let stays = format!("{} stays, and may have been read", path.display());
        return Err(e.context(stays));
    }
    let is_it = |port: &PortStatus| port.name == name && port.vm.is_some();
    if !status(&mut connect()?)?.ports.iter().any(is_it) {
        let _ = fs::remove_file(&path);
        bail!(
            "{} was not read: the configuration file is elsewhere\n    fix: --save=DIR/conf.d, \
             where DIR is that of nightporterd's --config",
            path.display()
        )
    }
    Ok(())
}

/// A directory that is not there is one that the daemon's user can list, whatever the umask: the
/// daemon does not start beside one that it cannot read.
fn make_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(0o755))
}

/// A file that was not there, whole and on the disk, which the daemon's user can read; or none.
fn write_new(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    let mut file = match File::create_new(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => bail!(
            "{} is there already\n    fix: `nightporter reload` reads it; to write another, \
             remove it",
            path.display()
        ),
        created => created.map_err(not_written(path))?,
    };
    let written = write(&mut file)
        .and_then(|()| file.set_permissions(Permissions::from_mode(0o644)))
        .and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = fs::remove_file(path);
    }
    written.map_err(not_written(path))
}

fn not_written(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let fix = "write as root where there is room, or elsewhere: --save=DIR";
    move |e| anyhow!("cannot write {}: {e}\n    fix: {fix}", path.display())
}

/// Asks for a change, and shows the steps that were or would be done. The daemon may allocate
/// gigabytes of store for it, but not on the thread that answers clients.
pub(crate) fn change(
    mut client: Client,
    control: &Path,
    json: bool,
    (change, dry): (Change, Dry),
) -> Result<()> {
    client.wait_for(LIMIT)?;
    let answers = || {
        let mut other = Client::connect(control)?;
        status(&mut other)?;
        eprintln!("the change is still being prepared");
        Ok(())
    };
    let request = Request::Change { change, dry_run: dry.dry_run };
    let plan = match client.ask_as_long_as(&request, answers)? {
        Reply::Plan(plan) => plan,
        other => return unexpected(&other),
    };
    print(json, &plan, |out| show(out, &plan))
}

fn show(out: &mut dyn Write, plan: &Plan) -> io::Result<()> {
    for line in &plan.steps {
        writeln!(out, "{line}")?;
    }
    for line in &plan.needs_restart {
        writeln!(out, "! waits for a restart: {line}")?;
    }
    match (plan.done, plan.steps.is_empty()) {
        (_, true) if plan.needs_restart.is_empty() => writeln!(out, "nothing to change"),
        (true, _) => Ok(()),
        (false, _) => writeln!(out, "nothing was changed: these changes would be made"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_given_twice_is_refused() {
        let keys = |text: &str| text.split(' ').map(|k| key_value(k).unwrap()).collect::<Vec<_>>();
        assert_eq!(map(&keys("mtu=9000 budget=8M")).unwrap().len(), 2);
        let error = map(&keys("mtu=9000 mtu=1500")).unwrap_err().to_string();
        assert!(error.starts_with("mtu is given twice"), "{error}");
    }

    #[test]
    fn a_file_is_written_whole_or_not_at_all_and_never_over_another() {
        let dir = std::env::temp_dir().join(format!("np-save-{}", std::process::id()));
        make_dir(&dir).unwrap();
        let path = dir.join("a.toml");
        let full = |file: &mut File| -> io::Result<()> {
            file.write_all(b"[[vm]]")?;
            Err(io::ErrorKind::StorageFull.into())
        };
        let error = write_new(&path, full).unwrap_err().to_string();
        assert!(error.contains("cannot write") && !path.exists(), "{error}");
        write_new(&path, |file| file.write_all(b"whole")).unwrap();
        let error = write_new(&path, full).unwrap_err().to_string();
        assert!(error.contains("fix: `nightporter reload` reads it"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&path)), (0o755, 0o644));
        fs::remove_dir_all(&dir).unwrap();
    }
}
