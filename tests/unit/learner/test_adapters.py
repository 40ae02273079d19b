"""Which parameters belong to which adapter."""

from collections import OrderedDict

from peft import LoraConfig, get_peft_model
from torch import nn

from learner.adapters import adapter_parameters, without_adapter


def test_a_layer_of_the_base_may_be_named_like_an_adapter() -> None:
    base = nn.Sequential(OrderedDict(value=nn.Linear(4, 4), policy=nn.Linear(4, 4), up=nn.Linear(4, 4)))
    model = get_peft_model(base, LoraConfig(target_modules=["value", "policy"]), adapter_name="policy")
    model.add_adapter("value", LoraConfig(target_modules=["policy"]))
    at = "base_model.model"
    policy = {f"{at}.{layer}.lora_{matrix}.policy.weight" for layer in ("value", "policy") for matrix in "AB"}
    assert adapter_parameters(model, "policy").keys() == policy
    value = {f"{at}.policy.lora_A.value.weight", f"{at}.policy.lora_B.value.weight"}
    assert adapter_parameters(model, "value").keys() == value
    assert {without_adapter(name, "policy") for name in policy} == {
        f"{at}.{layer}.lora_{matrix}.weight" for layer in ("value", "policy") for matrix in "AB"
    }
    assert without_adapter("value_head.weight", "value") == "value_head.weight"
