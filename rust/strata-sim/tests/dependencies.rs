//! The simulator drives Core alone: nothing that touches a disk, copies memory or knows Python is in its tree.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::process::Command;

#[test]
fn nothing_real_is_in_the_tree() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline", "--manifest-path", manifest])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let names: HashMap<String, String> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| (text(&package["id"]), text(&package["name"])))
        .collect();
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let mut next: Vec<String> =
        names.iter().filter(|(_, name)| *name == "strata-sim").map(|(id, _)| id.clone()).collect();
    let mut tree = BTreeSet::new();
    while let Some(id) = next.pop() {
        if tree.insert(names[&id].clone()) {
            let node = nodes.iter().find(|node| text(&node["id"]) == id).unwrap();
            next.extend(node["dependencies"].as_array().unwrap().iter().map(text));
        }
    }
    assert!(tree.contains("strata-core") && tree.len() > 10, "{tree:?}");
    for real in ["strata-disk", "strata-copy", "strata-py", "pyo3", "io-uring"] {
        assert!(!tree.contains(real), "{real} is in the simulator's tree: {tree:?}");
    }
}
