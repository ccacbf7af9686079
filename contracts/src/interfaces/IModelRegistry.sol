// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice One task of a model's graph.
/// @param taskId Digest of the task's canonical bytes.
/// @param vramBytes Video memory that the task needs.
/// @param flops Operations of one step.
/// @param priceMicroUsdc Reward of one step.
struct Task {
    bytes32 taskId;
    uint64 vramBytes;
    uint64 flops;
    uint64 priceMicroUsdc;
}

/// @notice A registered model.
/// @param developer Who registered it.
/// @param taskCount Number of tasks.
/// @param pricePerStep Sum of the tasks' rewards of one step, in micro-USDC.
/// @param dagRoot keccak256(abi.encode(tasks, edges)); the data is in `ModelRegistered`.
/// @param name The name it was registered under.
struct Model {
    address developer;
    uint16 taskCount;
    uint80 pricePerStep;
    bytes32 dagRoot;
    string name;
}

/// @title The models and their task graphs
/// @notice Stores a root and a price per model, emits the graph. A name belongs to its first
/// developer, who re-points it by registering a new model under it.
interface IModelRegistry {
    // ------------------------------------------------------------------------------- errors

    /// @notice The model id or a task's id is zero.
    error IdMissing();
    /// @notice The model is registered already.
    error ModelExists(bytes32 modelId);
    /// @notice No such model.
    error UnknownModel(bytes32 modelId);
    /// @notice Only the model's developer may do this.
    error NotDeveloper(bytes32 modelId, address developer);
    /// @notice The model is retired already.
    error ModelRetiredAlready(bytes32 modelId);
    /// @notice No model of that name.
    error UnknownName(string name);
    /// @notice The name belongs to another developer.
    error NameTaken(string name, address owner);
    /// @notice Names have 1 to 64 bytes.
    error NameLengthInvalid(uint256 length);
    /// @notice Models have 1 to 1024 tasks.
    error TaskCountInvalid(uint256 count);
    /// @notice More edges than the bound.
    error EdgeCountInvalid(uint256 count);
    /// @notice The edge does not lead from a task to a later task of the model.
    error EdgeInvalid(uint256 index, uint32 edge);
    /// @notice Edges must be strictly ascending; this one is not.
    error EdgesNotAscending(uint256 index);

    // ------------------------------------------------------------------------------- events

    /// @notice A model is registered.
    event ModelRegistered(
        bytes32 indexed modelId,
        address indexed developer,
        string name,
        bytes32 dagRoot,
        Task[] tasks,
        uint32[] edges
    );
    /// @notice A developer took the model off the market.
    event ModelRetired(bytes32 indexed modelId);

    // ------------------------------------------------------------------- developers' verbs

    /// @notice Registers a model under a name.
    /// @param modelId Digest of the model's manifest.
    /// @param tasks 1 to 1024 tasks in topological order.
    /// @param edges `from << 16 | to` with from < to, strictly ascending: acyclic, without duplicates.
    function register(bytes32 modelId, string calldata name, Task[] calldata tasks, uint32[] calldata edges) external;

    /// @notice Takes a model off the market, for good: clients and committee members start no new executions
    /// of it. Executions that were requested before go on and are paid.
    function retire(bytes32 modelId) external;

    // ------------------------------------------------------------------------------- views

    /// @notice The model; reverts when unknown.
    function modelOf(bytes32 modelId) external view returns (Model memory);

    /// @notice Price of one step in micro-USDC; reverts when unknown.
    function pricePerStep(bytes32 modelId) external view returns (uint256);

    /// @notice Whether the model's developer has retired it; false when unknown.
    function isRetired(bytes32 modelId) external view returns (bool);

    /// @notice The model that a name points to, retired or not; reverts when unknown.
    function modelByName(string calldata name) external view returns (bytes32 modelId);
}
