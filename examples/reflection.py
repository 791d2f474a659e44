"""What grpcurl does, in Python: call the service by reflection, without generated code.

python examples/reflection.py 127.0.0.1:9000
grpcurl -plaintext -d '{"prompt": "def fibonacci(n):", "sampling": {"max_tokens": 16}}' \
    127.0.0.1:9000 cascade.v1.Cascade/Complete
"""

import os
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9000"
keyed = (("authorization", f"Bearer {os.environ.get('CASCADE_API_KEY', 'none')}"),)
with grpc.insecure_channel(address) as channel:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("cascade.v1.Cascade").FindMethodByName("Complete")
    asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    request = ParseDict({"prompt": "def fibonacci(n):", "sampling": {"max_tokens": 16, "temperature": 0}}, asked())
    call = channel.unary_unary("/cascade.v1.Cascade/Complete", asked.SerializeToString, answered.FromString)
    print(MessageToJson(call(request, timeout=60, metadata=keyed)))
