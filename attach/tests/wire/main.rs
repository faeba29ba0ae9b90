//! Attached taps in a network namespace of the test's own, without any VM: the test is the VMM, the
//! network and the daemon, which gives every frame back as it came. Needs root.

mod attached;
