//! With the feature `ucx`: what UCX's header declares, in Rust. Without it nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "ucx")]
    bind();
}

/// Needs Debian's `libucx-dev` and `libclang-dev`.
#[cfg(feature = "ucx")]
fn bind() {
    println!("cargo::rustc-link-lib=ucp");
    println!("cargo::rustc-link-lib=ucs");
    let to = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("of Cargo"));
    let bindings = bindgen::Builder::default()
        .header_contents("ucx.h", "#include <ucp/api/ucp.h>")
        .allowlist_function("ucp_(init_version|cleanup|worker_.*|ep_create|ep_close_nbx)")
        .allowlist_function(
            "ucp_(config_read|config_release|am_send_nbx|am_data_release|request_free)",
        )
        .allowlist_function("ucs_status_string")
        .allowlist_type(
            "ucp_.*_field|ucp_.*_flags.*|ucp_feature|ucp_op_attr_t|ucp_dt_type|ucp_am_recv_attr_t",
        )
        .allowlist_var("UCP_API_MAJOR|UCP_API_MINOR")
        .prepend_enum_name(false)
        .layout_tests(false)
        .generate()
        .expect("ucp/api/ucp.h of UCX 1.13 or later (package libucx-dev)");
    bindings.write_to_file(to.join("ucp.rs")).expect("Cargo's directory");
}
