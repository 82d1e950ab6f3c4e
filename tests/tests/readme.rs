//! What README says about the tree is true.

use std::path::Path;

#[test]
fn every_path_in_the_code_map_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let crates = [
        "net/",
        "devices/",
        "vmm/",
        "guest-images/",
        "tests/",
        "xtask/",
    ];
    let mut checked = 0;
    for path in readme.split('`').skip(1).step_by(2) {
        if crates.iter().any(|name| path.starts_with(name)) {
            assert!(
                root.join(path).exists(),
                "README names {path}, which does not exist"
            );
            checked += 1;
        }
    }
    assert!(
        checked > 15,
        "only {checked} paths found: has the format changed?"
    );
}

#[test]
fn every_test_named_as_holding_an_invariant_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    for name in readme.split('`').skip(1).step_by(2) {
        let Some((path, function)) = name
            .strip_prefix("net::")
            .and_then(|rest| rest.rsplit_once("::"))
        else {
            continue;
        };
        let found = path
            .split("::")
            .filter(|part| {
                !matches!(
                    *part,
                    "tests" | "opening" | "download" | "upload" | "closing"
                )
            })
            .collect::<Vec<_>>()
            .join("/");
        let candidates = [
            format!("net/src/{found}.rs"),
            format!("net/src/{found}/mod.rs"),
            format!("net/src/{found}/tests.rs"),
        ];
        let exists = candidates.iter().any(|file| {
            std::fs::read_to_string(root.join(file))
                .is_ok_and(|text| text.contains(&format!("fn {function}(")))
        });
        assert!(
            exists,
            "README names {name}, which is not in {candidates:?}"
        );
    }
}
