// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {IModelRegistry, Model, Task} from "../src/interfaces/IModelRegistry.sol";

contract ModelRegistryTest is Base {
    bytes32 internal constant OTHER = keccak256("other model");

    function assertTerms(bytes32 model, uint256 count, uint256 price) internal view {
        (uint256 pricePerStep, uint256 taskCount) = models.termsOf(model);
        assertEq(pricePerStep, price);
        assertEq(taskCount, count);
    }

    function test_register_stores_root_and_price() public view {
        Model memory model = models.modelOf(MODEL);
        require(model.developer == address(this) && model.taskCount == 10);
        assertEq(model.pricePerStep, 10 * 100_000_000);
        require(model.dagRoot == keccak256(abi.encode(makeTasks(10, 100_000_000), makeChain(10))));
        require(models.modelByName("tiny") == MODEL);
    }

    function test_a_model_is_registered_once() public {
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.ModelExists.selector, MODEL));
        models.register(MODEL, "again", makeTasks(1, 1), makeChain(1));
    }

    function test_a_name_belongs_to_its_first_developer() public {
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.NameTaken.selector, "tiny", address(this)));
        vm.prank(client);
        models.register(OTHER, "tiny", makeTasks(1, 1), makeChain(1));
        models.register(OTHER, "tiny", makeTasks(1, 1), makeChain(1));
        require(models.modelByName("tiny") == OTHER);
        assertTerms(MODEL, 10, 10 * 100_000_000); // the old model is still there
    }

    /// @dev The registry cannot know whose an id is. Whoever registers a stranger's id with other figures makes the id
    /// useless: members, nodes and clients refuse a model whose manifest has another root (`dagRoot`), and the stranger
    /// publishes its model under another id. Whoever registers it with the right figures may retire it. It earns nothing
    /// in either case: all pay is the nodes'.
    function test_a_stranger_that_registers_an_id_first_can_only_make_it_useless() public {
        vm.prank(client);
        models.register(OTHER, "cheap", makeTasks(10, 0), makeChain(10));
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.ModelExists.selector, OTHER));
        models.register(OTHER, "mine", makeTasks(10, 100_000_000), makeChain(10));
        require(models.modelOf(OTHER).dagRoot != keccak256(abi.encode(makeTasks(10, 100_000_000), makeChain(10))));
        models.register(keccak256("the same model with another label"), "mine", makeTasks(10, 100_000_000), makeChain(10));
        vm.prank(client);
        models.retire(OTHER);
    }

    function test_unknown_models_and_names() public {
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.UnknownModel.selector, OTHER));
        models.modelOf(OTHER);
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.UnknownModel.selector, OTHER));
        models.termsOf(OTHER);
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.UnknownName.selector, "nobody"));
        models.modelByName("nobody");
    }

    function test_the_developer_retires_a_model_once() public {
        require(!models.isRetired(MODEL));
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.NotDeveloper.selector, MODEL, address(this)));
        vm.prank(client);
        models.retire(MODEL);
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.UnknownModel.selector, OTHER));
        models.retire(OTHER);

        models.retire(MODEL);
        require(models.isRetired(MODEL));
        assertTerms(MODEL, 10, 10 * 100_000_000); // what runs is still paid
        require(models.modelByName("tiny") == MODEL);
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.ModelRetiredAlready.selector, MODEL));
        models.retire(MODEL);
    }

    function refuse(string memory name, Task[] memory tasks, uint32[] memory edges, bytes memory reason) internal {
        vm.expectRevert(reason);
        models.register(OTHER, name, tasks, edges);
    }

    function test_register_refuses_bad_names_and_ids() public {
        refuse("", makeTasks(1, 1), makeChain(1), abi.encodeWithSelector(IModelRegistry.NameLengthInvalid.selector, 0));
        refuse(
            string(new bytes(65)),
            makeTasks(1, 1),
            makeChain(1),
            abi.encodeWithSelector(IModelRegistry.NameLengthInvalid.selector, 65)
        );
        Task[] memory tasks = makeTasks(2, 1);
        tasks[1].taskId = 0;
        refuse("m", tasks, makeChain(2), abi.encodeWithSelector(IModelRegistry.IdMissing.selector));
        vm.expectRevert(abi.encodeWithSelector(IModelRegistry.IdMissing.selector));
        models.register(0, "m", makeTasks(1, 1), makeChain(1));
    }

    function test_register_refuses_bad_sizes() public {
        refuse(
            "m", makeTasks(0, 1), new uint32[](0), abi.encodeWithSelector(IModelRegistry.TaskCountInvalid.selector, 0)
        );
        refuse(
            "m",
            makeTasks(1025, 1),
            makeChain(2),
            abi.encodeWithSelector(IModelRegistry.TaskCountInvalid.selector, 1025)
        );
        refuse(
            "m",
            makeTasks(2, 1),
            new uint32[](4097),
            abi.encodeWithSelector(IModelRegistry.EdgeCountInvalid.selector, 4097)
        );
    }

    function test_register_refuses_cycles_loops_duplicates_and_missing_tasks() public {
        uint32[] memory edges = new uint32[](1);
        uint32[4] memory bad = [uint32(1 << 16 | 1), 2 << 16 | 1, 1 << 16 | 3, 0]; // loop, back, out, 0 to 0
        for (uint256 i; i < bad.length; ++i) {
            edges[0] = bad[i];
            refuse("m", makeTasks(3, 1), edges, abi.encodeWithSelector(IModelRegistry.EdgeInvalid.selector, 0, bad[i]));
        }
        edges = new uint32[](2);
        edges[0] = edges[1] = 1;
        refuse("m", makeTasks(3, 1), edges, abi.encodeWithSelector(IModelRegistry.EdgesNotAscending.selector, 1));
    }

    function test_the_largest_model_fits_a_transaction() public {
        uint256 before = gasleft();
        models.register(OTHER, "large", makeTasks(1024, type(uint64).max), makeChain(1024));
        require(before - gasleft() < 1 << 24);
        assertTerms(OTHER, 1024, 1024 * uint256(type(uint64).max));
    }

    function testFuzz_accepted_edges_are_a_topological_order(uint32 edge) public {
        uint32[] memory edges = new uint32[](1);
        edges[0] = edge;
        bool legal = edge >> 16 < edge & 0xffff && edge & 0xffff < 8;
        if (!legal) vm.expectRevert(abi.encodeWithSelector(IModelRegistry.EdgeInvalid.selector, 0, edge));
        models.register(OTHER, "m", makeTasks(8, 1), edges);
    }
}
