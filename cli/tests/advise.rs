//! `nightporter advise` without rights and without VMs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A mount of `/proc` that hides processes of others, and a user who is not root.
#[test]
#[ignore = "needs root (a mount namespace)"]
fn advise_says_that_it_may_not_see_all_vms() {
    let dir = std::env::temp_dir().join(format!("np-advise-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let tool = dir.join("nightporter");
    fs::copy(env!("CARGO_BIN_EXE_nightporter"), &tool).unwrap();
    let script = "mount -t proc -o hidepid=2 proc /proc && \
                  exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$0\" \"$@\"";
    let run = |json: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(&tool).args(["advise", "--for", "10ms"]);
        let output = command.args(json).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).unwrap()
    };
    let (text, json) = (run(&[]), run(&["--json"]));
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(
        text,
        "no VM was found: no QEMU, user-mode Linux, Cloud Hypervisor, Firecracker\n\
         or crosvm runs here\n\
         /proc hides processes of other users: run as root to see all VMs\n"
    );
    assert!(json.contains("\"hidden\":true,\"vms\":[]"), "{json}");
}
