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
    /// The VM's tap, as in `virsh domiflist`; the VM has its name. With --bridge the bridge.
    #[arg(value_name = "TAP")]
    tap: String,
    /// It is a bridge, as in `virsh net-info`: its taps are attached, those that come later too.
    #[arg(long)]
    bridge: bool,
    /// Keys as in [[vm]] of the configuration file, or in [[attach]].
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
        if self.bridge {
            let change = Change::AddBridge { bridge: self.tap.clone(), keys: map(&self.keys)? };
            return Ok((change, self.dry, self.save.clone()));
        }
        let tap = ("tap".into(), self.tap.clone());
        let keys: Vec<_> = [tap].into_iter().chain(self.keys.iter().cloned()).collect();
        let change = Change::AddVm { name: self.tap.clone(), keys: map(&keys)? };
        Ok((change, self.dry, self.save.clone()))
    }

    /// Other programs may forward what they read from the tap.
    pub(crate) fn warn_of_readers(&self) {
        let index = fs::read_to_string(format!("/sys/class/net/{}/ifindex", self.tap));
        let text = fs::read_to_string("/proc/net/packet");
        let Some((index, text)) = index.ok().zip(text.ok()) else { return };
        if readers(&text, index.trim()) > 0 {
            eprintln!(
                "another program reads all frames of {}: it sees each frame from a VM twice\n    \
                 fix: if it forwards frames (OVS's user-space datapath), detach the tap",
                self.tap
            );
        }
    }
}

/// Sockets that get all frames of the interface with this number, in the text of
/// `/proc/net/packet` (packet(7); net/packet/af_packet.c): protocol 3, of this or any interface.
fn readers(text: &str, index: &str) -> usize {
    let is_one = |line: &&str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        matches!(columns[..], [_, _, _, "0003", of, ..] if of == index || of == "0")
    };
    text.lines().filter(is_one).count()
}

/// `nightporter detach`: the VM with a tap is removed.
#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// The VM's tap, or with --bridge the bridge. A tap that came with its bridge stays plain until
    /// it is attached by a command, or made anew.
    #[arg(value_name = "TAP", add = names::taps())]
    tap: String,
    /// It is a bridge: no tap is attached any more because it is there.
    #[arg(long, conflicts_with = "drain")]
    bridge: bool,
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
        if self.bridge {
            let change = Change::RemoveBridge { bridge: self.tap.clone() };
            return Ok((change, self.dry, self.save.clone()));
        }
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
    let Some(dir) = save.dir(control)? else {
        return self::change(connect()?, control, json, (change, dry));
    };
    let section = Section::of(&change);
    let path = section.file_in(&dir);
    match change {
        Change::RemoveVm { .. } | Change::RemoveBridge { .. } => {
            section.must_be_alone_in(&path)?;
            remove(connect()?, control, json, &path, change)
        }
        _ => self::save(connect, control, json, (&section, &dir), change),
    }
}

/// A section of a configuration file that is saved in a file of its own.
#[derive(Clone, Debug)]
struct Section {
    name: String,
    /// It is an `[[attach]]`, else a `[[vm]]`.
    is_bridge: bool,
}

impl Section {
    /// Of the VM or bridge that comes or goes.
    fn of(change: &Change) -> Self {
        let (name, is_bridge) = match change {
            Change::AddBridge { bridge, .. } | Change::RemoveBridge { bridge } => (bridge, true),
            Change::AddVm { name, .. } | Change::RemoveVm { name, .. } => (name, false),
            other => unreachable!("nothing to be saved: {other:?}"),
        };
        Self { name: name.clone(), is_bridge }
    }

    fn shown(&self) -> String {
        let kind = if self.is_bridge { "bridge" } else { "VM" };
        format!("{kind} {}", self.name)
    }

    fn file_in(&self, dir: &Path) -> PathBuf {
        let kind = if self.is_bridge { "attach-" } else { "" };
        dir.join(format!("{kind}{}.toml", self.name))
    }

    /// Whether the daemon has it.
    fn is_in(&self, status: &Status) -> bool {
        match self.is_bridge {
            true => status.bridges.iter().any(|it| it.bridge == self.name),
            false => status.ports.iter().any(|it| it.name == self.name && it.vm.is_some()),
        }
    }

    /// The file has nothing else.
    ///
    /// # Errors
    /// There is no such file, or it may have more.
    fn must_be_alone_in(&self, path: &Path) -> Result<()> {
        let (table, key) = if self.is_bridge { ("attach", "bridge") } else { ("vm", "name") };
        must_be_own((&self.shown(), table, &format!("{key} = \"{}\"", self.name)), path)
    }
}

/// The file has this section alone, of that table and with that line.
///
/// # Errors
/// There is no such file, or it may have more.
fn must_be_own((section, table, line): (&str, &str, &str), path: &Path) -> Result<()> {
    let fix = format!(
        "take {section} out of the file that has it, and `nightporter reload`; if none has it, \
         leave out --save"
    );
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|e| anyhow!("cannot read {shown}: {e}\n    fix: {fix}"))?;
    let lines = text.lines().map(str::trim);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let begins = lines.next() == Some(&format!("[[{table}]]"));
    let has_others = lines.clone().any(|line| line.starts_with('['));
    if !begins || has_others || !lines.any(|it| it == line) {
        bail!("{shown} has more than {section}, or another\n    fix: {fix}");
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
    (section, dir): (&Section, &Path),
    change: Change,
) -> Result<()> {
    let mut client = connect()?;
    client.wait_for(LIMIT)?;
    let text = match client.ask(&Request::Change { change, dry_run: true })? {
        Reply::Plan(Plan { section: Some(section), .. }) => section,
        Reply::Plan(plan) => {
            let name = &section.name;
            eprintln!("{name} is in a configuration file already: nothing is written");
            return print(json, &plan, |_| Ok(()));
        }
        other => return unexpected(&other),
    };
    let path = section.file_in(dir);
    make_dir(dir).map_err(not_written(dir))?;
    write_new(&path, |file| file.write_all(text.as_bytes()))?;
    if let Err(e) = self::change(client, control, json, Dry { dry_run: false }.as_change()) {
        if e.is::<Refused>() {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        let stays = format!("{} stays, and may have been read", path.display());
        return Err(e.context(stays));
    }
    if !section.is_in(&status(&mut connect()?)?) {
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
    fn a_reader_of_all_frames_is_found() {
        let text = "sk       RefCnt Type Proto  Iface R Rmem   User   Inode\n\
                    00000000 3      3    0003   7     1 0      0      15377\n\
                    00000000 3      3    88cc   9     1 0      0      15378\n";
        assert_eq!(["7", "9", "0"].map(|index| readers(text, index)), [1, 0, 0]);
        let all = text.replace(" 7 ", " 0 ");
        assert_eq!(["7", "9"].map(|index| readers(&all, index)), [1, 1]);
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
