//! The owners of the VMs' sockets. All users and groups in the configuration are looked up at the
//! start, because later there is no way to ask for one as libraries do. One that does not exist
//! concerns only the VMs that name it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use nix::unistd::{Group, User};

use crate::config::{Config, DaemonConfig, VmConfig};
use crate::errors::{StartError, error};

/// The users who may connect: connecting needs write permission on the socket.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Access {
    /// File mode; `None` keeps the umask's (only our own user may connect).
    pub mode: Option<u32>,
    /// Owner, as a user id.
    pub uid: Option<u32>,
    /// Group, as a group id.
    pub gid: Option<u32>,
}

/// How many there may be: each takes some instructions of the filter of system calls, which may
/// have 4,096.
const OWNERS_MAX: usize = 64;

/// Names of a user and a group.
type Names = (Option<String>, Option<String>);

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners {
    /// `[daemon]`'s, for VMs without their own.
    default: Names,
    known: BTreeMap<Names, Access>,
    unknown: BTreeMap<Names, StartError>,
    /// `daemon.status_group`.
    lookers: Option<Result<Access, StartError>>,
}

impl Owners {
    /// All that `config` names.
    ///
    /// # Errors
    /// None of them exists; they are too many.
    pub(crate) fn of(config: &Config) -> Result<Self, StartError> {
        let DaemonConfig { socket_user, socket_group, status_group, .. } = &config.daemon;
        let default = (socket_user.clone(), socket_group.clone());
        let mut found = BTreeMap::from([(default.clone(), look_up("daemon", &default))]);
        for vm in &config.vms {
            if let Entry::Vacant(entry) = found.entry(names(&default, vm)) {
                let access = look_up(&format!("vm.{}", vm.name), entry.key());
                entry.insert(access);
            }
        }
        let lookers = status_group.as_ref().map(|name| {
            let gid = Some(gid(name, "daemon.status_group")?);
            Ok(Access { mode: Some(0o660), uid: None, gid })
        });
        let (mut known, mut unknown) = (BTreeMap::new(), BTreeMap::new());
        for (names, found) in found {
            match found {
                Ok(access) => drop(known.insert(names, access)),
                Err(e) => drop(unknown.insert(names, e)),
            }
        }
        if known.len() > OWNERS_MAX {
            let what = format!("sockets have {} owners and groups", known.len());
            return Err(error(what, &format!("use {OWNERS_MAX} of them at most")));
        }
        match unknown.values().next() {
            Some(e) if known.is_empty() => Err(e.clone()),
            _ => Ok(Self { default, known, unknown, lookers }),
        }
    }

    /// The user or group of a VM that does not exist.
    pub(crate) fn problem(&self, vm: &VmConfig) -> Option<&StartError> {
        self.unknown.get(&names(&self.default, vm))
    }

    /// All of these.
    pub(crate) fn problems(&self) -> impl Iterator<Item = &StartError> {
        self.unknown.values().chain(self.lookers.iter().filter_map(|it| it.as_ref().err()))
    }

    /// The users who may connect to the control socket.
    ///
    /// # Errors
    /// `daemon.status_group` does not exist: then only our own user.
    pub(crate) fn of_control(&self) -> Result<Access, StartError> {
        self.lookers.clone().unwrap_or(Ok(OWN))
    }

    /// The users who may connect to the sockets of a VM. `None`: they were not known at the start.
    pub(crate) fn find(&self, vm: &VmConfig) -> Option<Access> {
        self.known.get(&names(&self.default, vm)).copied()
    }

    /// The same; only our own user, if they were not known.
    pub(crate) fn access(&self, vm: &VmConfig) -> Access {
        self.find(vm).unwrap_or(OWN)
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = Access> {
        let lookers = self.lookers.iter().filter_map(|it| it.as_ref().ok());
        self.known.values().chain(lookers).copied()
    }
}

/// Our own user's.
pub(crate) const OWN: Access = Access { mode: Some(0o600), uid: None, gid: None };

/// Names that a VM does not give are those of `[daemon]`.
fn names(default: &Names, vm: &VmConfig) -> Names {
    let user = vm.socket_user.clone().or_else(|| default.0.clone());
    (user, vm.socket_group.clone().or_else(|| default.1.clone()))
}

fn look_up(of: &str, (user, group): &Names) -> Result<Access, StartError> {
    let mut access = OWN;
    if let Some(name) = user {
        let found = User::from_name(name).ok().flatten();
        let user = found.ok_or_else(|| missing("user", name, &format!("{of}.socket_user")))?;
        (access.mode, access.uid) = (Some(0o660), Some(user.uid.as_raw()));
    }
    if let Some(name) = group {
        access.mode = Some(0o660);
        access.gid = Some(gid(name, &format!("{of}.socket_group"))?);
    }
    Ok(access)
}

/// The number of the group that this key names.
fn gid(name: &str, key: &str) -> Result<u32, StartError> {
    let found = Group::from_name(name).ok().flatten();
    found.map(|group| group.gid.as_raw()).ok_or_else(|| missing("group", name, key))
}

fn missing(kind: &str, name: &str, key: &str) -> StartError {
    let fix = format!("correct {key}, or create it");
    error(format!("there is no {kind} \"{name}\" on this host"), &fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(daemon: &str, vms: &str) -> Config {
        let text = format!("[daemon]\n{daemon}\n{vms}");
        Config::parse("np.toml", &text, &BTreeMap::new()).unwrap()
    }

    fn vm(name: &str, more: &str) -> String {
        format!("[[vm]]\nname = \"{name}\"\n{more}\n")
    }

    #[test]
    fn a_vms_socket_is_whose_it_says_else_the_daemons_else_our_own() {
        let both = "socket_user = \"root\"\nsocket_group = \"root\"";
        let vms = vm("a", "") + &vm("b", "socket_group = \"daemon\"");
        let of_root = config(both, &vms);
        let [a, b] = &of_root.vms[..] else { panic!("two VMs") };
        let owners = Owners::of(&of_root).unwrap();
        let of = |uid, gid| Access { mode: Some(0o660), uid, gid };
        assert_eq!(owners.access(a), of(Some(0), Some(0)));
        assert_eq!(owners.access(b), of(Some(0), Some(1)), "of Debian's group daemon");
        let owners = Owners::of(&config("", &vms)).unwrap();
        assert_eq!((owners.access(a), owners.access(b)), (OWN, of(None, Some(1))));
        assert_eq!(owners.all().count(), 2);
        // A VM that comes has one of these, or none.
        let later = &config("", &vm("c", "socket_group = \"root\"")).vms[0];
        assert_eq!((owners.find(later), owners.access(later)), (None, OWN));
    }

    #[test]
    fn who_does_not_exist_is_named_and_too_many_are_refused() {
        let vms = vm("a", "socket_user = \"no-such\"") + &vm("b", "");
        let with_b = config("", &vms);
        let owners = Owners::of(&with_b).unwrap();
        let [a, b] = &with_b.vms[..] else { panic!("two VMs") };
        assert_eq!((owners.find(a), owners.access(a)), (None, OWN));
        assert!(owners.find(b).is_some() && owners.problem(b).is_none());
        let said = owners.problem(a).unwrap().to_string();
        assert!(
            said.contains("no user \"no-such\"") && said.contains("vm.a.socket_user"),
            "{said}"
        );
        assert_eq!(owners.problems().count(), 1);
        // Of no VM that there is.
        let none = config("socket_group = \"no-such\"", &vm("a", ""));
        let said = Owners::of(&none).unwrap_err().to_string();
        assert!(said.contains("no group \"no-such\"") && said.contains("daemon.socket"), "{said}");
    }
}
