use std::process::ExitCode;

/// One crash point per line; test builds only.
pub fn fault_points() -> ExitCode {
    for point in farshore_node::fault::POINTS {
        println!("{point}");
    }
    ExitCode::SUCCESS
}
