//! `--check` by root: it judges as the user would as whom the unit of systemd starts the daemon.

use std::ffi::CString;
use std::path::Path;
use std::process::Command;

use nix::unistd::{Gid, Group, Uid, User, getegid, geteuid, getgroups};
use nix::unistd::{getgrouplist, setgid, setgroups, setuid};
use rustix::fs::{Access as Rights, access};

use crate::config::{Config, VmConfig};
use crate::owners::Access;
use crate::owners::Owners;

/// The daemon's rights, as far as its sockets need them.
#[derive(Debug)]
pub struct Judge {
    user: String,
    /// It may give files to anybody.
    may_give: bool,
}

/// The unit's words (systemd.exec(5)).
#[derive(Debug, Default, Eq, PartialEq)]
struct Unit {
    user: String,
    groups: Vec<String>,
    may_give: bool,
}

impl Unit {
    /// Of the output of `systemctl show`: lines of KEY=VALUE.
    fn parse(shown: &str) -> Self {
        let mut unit = Self::default();
        for (key, value) in shown.lines().filter_map(|line| line.split_once('=')) {
            match key {
                "User" => value.clone_into(&mut unit.user),
                "SupplementaryGroups" => {
                    unit.groups = value.split_whitespace().map(str::to_owned).collect();
                }
                "AmbientCapabilities" => unit.may_give = value.contains("cap_chown"),
                _ => {}
            }
        }
        unit
    }

    fn of_this_host() -> Self {
        let mut show = Command::new("systemctl");
        show.args(["show", "--property=User,SupplementaryGroups,AmbientCapabilities"]);
        let output = show.arg("nightporterd.service").output();
        output.map_or_else(
            |_| Self::default(),
            |it| Self::parse(&String::from_utf8_lossy(&it.stdout)),
        )
    }
}

impl Judge {
    /// Becomes the daemon's user, if this process is root's and a unit says who that is; for good.
    ///
    /// # Errors
    /// The unit's user or a group of it does not exist; the system refuses.
    pub fn become_daemon() -> Result<Self, String> {
        let own =
            || User::from_uid(geteuid()).ok().flatten().map_or_else(String::new, |it| it.name);
        if !geteuid().is_root() {
            return Ok(Self { user: own(), may_give: false });
        }
        let unit = Unit::of_this_host();
        if unit.user.is_empty() {
            return Ok(Self { user: own(), may_give: true });
        }
        Self::become_user(unit).map_err(|e| format!("cannot judge as the unit's user: {e}"))
    }

    fn become_user(unit: Unit) -> Result<Self, String> {
        let said = |e: nix::Error| e.to_string();
        let user = User::from_name(&unit.user).map_err(said)?;
        let user = user.ok_or_else(|| format!("there is no user \"{}\"", unit.user))?;
        let name = CString::new(unit.user.as_str()).map_err(|e| e.to_string())?;
        let mut groups = getgrouplist(&name, user.gid).map_err(said)?;
        for name in &unit.groups {
            let group = Group::from_name(name).map_err(said)?;
            groups.push(group.ok_or_else(|| format!("there is no group \"{name}\""))?.gid);
        }
        setgroups(&groups).and_then(|()| setgid(user.gid)).map_err(said)?;
        setuid(user.uid).map_err(said)?;
        Ok(Self { user: unit.user, may_give: unit.may_give })
    }

    /// The sockets that the daemon could not make, or not give to their owners.
    pub(crate) fn sockets(&self, config: &Config, owners: &Owners) -> Vec<String> {
        let of_vm = |vm: &VmConfig| {
            let owner = owners.find(vm).and_then(|owner| self.not_given(owner));
            let found = owner.or_else(|| self.not_made(&vm.socket))?;
            Some(format!("vm.{}: {found}", vm.name))
        };
        let control = owners.of_control().ok().and_then(|owner| self.not_given(owner));
        let control = control.map(|found| format!("daemon.status_group: {found}"));
        config.vms.iter().filter_map(of_vm).chain(control).collect()
    }

    fn not_given(&self, Access { uid, gid, .. }: Access) -> Option<String> {
        let user = &self.user;
        if self.may_give {
            return None;
        }
        if uid.is_some_and(|uid| Uid::from_raw(uid) != geteuid()) {
            return Some(format!(
                "user {user} may not give its socket to another user\n    fix: use socket_group, \
                 or see socket_user in docs/configuration.md"
            ));
        }
        let gid = Gid::from_raw(gid?);
        let is_member = gid == getegid() || getgroups().is_ok_and(|groups| groups.contains(&gid));
        let group = Group::from_gid(gid).ok().flatten().map_or(gid.to_string(), |it| it.name);
        (!is_member).then(|| {
            format!(
                "user {user} is not in group {group}, to which its socket is to belong\n    \
                 fix: usermod --append --groups {group} {user}; or SupplementaryGroups={group} in \
                 the daemon's unit"
            )
        })
    }

    fn not_made(&self, socket: &Path) -> Option<String> {
        let dir = socket.parent()?;
        // The unit makes its own directory, and the daemon makes one that is in another.
        let dir = if dir.exists() { dir } else { dir.parent()? };
        if dir == Path::new("/run") || access(dir, Rights::WRITE_OK | Rights::EXEC_OK).is_ok() {
            return None;
        }
        let (user, dir) = (&self.user, dir.display());
        Some(format!(
            "user {user} may not make its socket in {dir}\n    fix: choose a vm.socket where it \
             may, for example in /run/nightporter"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_read_as_systemctl_shows_it() {
        let shown = "User=nightporter\nSupplementaryGroups=kvm qemu\n\
                     AmbientCapabilities=cap_chown cap_net_admin\n";
        let (user, groups) = ("nightporter".into(), vec!["kvm".into(), "qemu".into()]);
        assert_eq!(Unit::parse(shown), Unit { user, groups, may_give: true });
        assert_eq!(Unit::parse("User=\nSupplementaryGroups=\n"), Unit::default());
    }

    #[test]
    fn a_group_that_the_user_is_not_in_is_named() {
        let judge = |may_give| Judge { user: "somebody".into(), may_give };
        let strange = Access { mode: Some(0o660), uid: None, gid: Some(4_000_000) };
        let said = judge(false).not_given(strange).unwrap();
        assert!(said.starts_with("user somebody is not in group 4000000, "), "{said}");
        assert_eq!(judge(true).not_given(strange), None);
        let own = Access { gid: Some(getegid().as_raw()), ..strange };
        assert_eq!(judge(false).not_given(own), None);
        let others = Access { uid: Some(4_000_000), ..own };
        assert!(judge(false).not_given(others).unwrap().contains("to another user"));
    }

    #[test]
    fn a_socket_is_made_where_there_is_a_place() {
        let judge = Judge { user: "somebody".into(), may_give: false };
        assert_eq!(judge.not_made(Path::new("/tmp/x.sock")), None);
        let said = judge.not_made(Path::new("/nowhere/deep/x.sock")).unwrap();
        assert!(said.starts_with("user somebody may not make its socket in /nowhere"), "{said}");
    }
}
